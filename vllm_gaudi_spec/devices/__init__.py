"""Device implementations. Each has its own folder, which `device_table.py` names."""
