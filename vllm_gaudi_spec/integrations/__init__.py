"""Parts of this project inside platforms of others, each with versions and patches of its own."""
