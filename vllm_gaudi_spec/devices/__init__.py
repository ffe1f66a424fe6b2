"""Device implementations, each in its own folder. `device_table.py` lists them."""
