"""Forward passes with tokens dropped or patches hidden."""
