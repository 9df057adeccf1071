"""SFTP and SMB servers."""
