"""Parameters, gradients and optimizer state split over the ranks: what `zero` is made of."""
