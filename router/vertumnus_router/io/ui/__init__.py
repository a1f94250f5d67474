"""The live page for operators, ``GET /ui``: static files, and one JSON that they poll."""
