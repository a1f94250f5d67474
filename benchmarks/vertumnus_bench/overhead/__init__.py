"""What a router costs: an engine and a load in C that cost next to nothing, and servers between."""
