"""Output lines: what the worker writes for a row, and how every other command reads it. Pure.

There is one format on disk; docs/format.md describes it. The server's body stays as the server wrote it, except for
what varies between two equal answers.
"""
