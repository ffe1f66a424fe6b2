"""The devices, each in a folder of its own, which `device_table.py` names."""
