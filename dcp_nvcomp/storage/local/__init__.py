"""Local disks, and whatever is mounted like one."""
