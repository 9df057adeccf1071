"""Servers that keep files and directories: SFTP and SMB."""
