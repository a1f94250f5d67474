"""Find the servers that the router follows: in a file, or in the endpoints of Kubernetes Services.

A source says which URLs it knows of now; ``following.py`` makes the fleet follow them.
"""
