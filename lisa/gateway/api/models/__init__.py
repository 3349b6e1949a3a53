"""Request and response types of the native API; also the source of the OpenAPI schemas.

In requests, `null` means the same as omitting the field, except for `body`, where null is a value.
"""
