"""The stores that grant leases."""
