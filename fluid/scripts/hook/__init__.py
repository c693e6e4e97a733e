"""What is first on the path of a script's interpreter, so that it loads this ``sitecustomize``."""
