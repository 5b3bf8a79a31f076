"""What may enter a tier: one rule a module, sans-IO."""
