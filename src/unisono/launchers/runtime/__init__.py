"""What every process of a run knows about itself and its machine. No torch in here."""
