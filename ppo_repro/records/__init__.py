"""Every buffer of a run on disk: schema, writer, reader, digests, manifest."""
