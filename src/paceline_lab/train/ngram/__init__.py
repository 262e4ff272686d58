"""N-gram models that draft: counts, probabilities, files and figures."""
