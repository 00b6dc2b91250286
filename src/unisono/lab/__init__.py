"""Experiments on one machine: emulated networks."""
