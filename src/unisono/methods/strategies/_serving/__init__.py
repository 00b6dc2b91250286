"""Servers of parameters, and how workers talk to them: what the methods with a server share."""
