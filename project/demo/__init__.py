"""What `manage.py demo` does: asks two servers for jobs, and checks what they did."""
