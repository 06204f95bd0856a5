"""What runs: kernels, their executions, and the one who keeps them."""
