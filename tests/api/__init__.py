"""The door and the desk: who may enter, what is refused, and in which words."""
