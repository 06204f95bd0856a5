"""What a person sees in a terminal: cell outputs, made harmless and readable, and the progress of a run."""
