"""Where kernels run: sandboxes, the engines that make them, and the link to the supervisor inside each."""
