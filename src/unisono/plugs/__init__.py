"""Our methods below other libraries' programs, one file or folder a library."""
