"""What a finished run says: reading, comparing, drawing and reporting run folders."""
