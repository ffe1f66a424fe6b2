"""What several devices share."""
