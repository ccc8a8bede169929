"""What several families read alike."""
