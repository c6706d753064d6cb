"""The HTTP face of the public API, in OpenAI's form: another way to the same requests as gRPC."""
