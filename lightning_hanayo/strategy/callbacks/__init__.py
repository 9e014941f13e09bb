"""Lightning's callbacks that compute with all parameters, of which a rank holds its own."""
