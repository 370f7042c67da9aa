"""Turns the rows of a chunk into calls for the engine: a row becomes the body of a request, in the server's words."""
