"""Changes of other people's models: ``convert_`` and ``restore_``, fused norms, and files that hold a conversion."""
