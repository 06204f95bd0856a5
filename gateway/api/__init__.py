"""Faces: they translate and authorise, nothing else. They do not know each other."""
