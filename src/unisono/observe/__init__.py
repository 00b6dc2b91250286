"""The record of a run, and what reads only that: reports, the live page; and the doctor."""
