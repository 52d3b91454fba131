"""What is wrong with a host, a file or an old script, and the command that helps: `doctor()`."""
