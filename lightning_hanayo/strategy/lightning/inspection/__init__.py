"""What users look at: profiles, model summaries and throughput, with the numbers of the whole model."""
