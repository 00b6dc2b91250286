"""What a run will cost before it runs: costs, memory, plans, simulations, comparisons, rehearsals."""
