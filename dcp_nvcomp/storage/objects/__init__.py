"""Azure Blob Storage and Google Cloud Storage."""
