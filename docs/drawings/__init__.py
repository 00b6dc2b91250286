"""Drawings of who sends what when, a picture for each method's page, from what the methods do: `python -m drawings` in
docs/ writes them.

causes.py trains a small model and notes what happens; replay.py lays it out in time; svg.py draws that; pages.py says
which drawings there are, special.py what some methods do outside of messages.
"""
