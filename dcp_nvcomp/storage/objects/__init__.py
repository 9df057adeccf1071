"""Object stores: S3, Azure Blob Storage and Google Cloud Storage."""
