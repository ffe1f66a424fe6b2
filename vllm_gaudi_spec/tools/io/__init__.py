"""What commands have in common: options, files that users name, bars."""
