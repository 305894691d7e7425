"""Where the model looks: attention read, averaged or followed through the layers."""
