"""Ways to train together: strategies and replicas, reducers and their kernels, and the specs that name them."""
