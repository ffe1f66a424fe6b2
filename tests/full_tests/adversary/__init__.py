"""Random requests against random engine configurations: drafts must not change any answer."""
