"""Does the model need what lies beside the object?"""
