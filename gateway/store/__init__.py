"""What is remembered: records of kernels and executions, their events, and who may write them."""
