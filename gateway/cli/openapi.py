"""`cellgate openapi`: the API as a document, for generators and reviewers, without a running gateway."""

import typer


def openapi() -> None:
    """Print the OpenAPI document of the native API."""
    import json

    from gateway import settings
    from gateway.app import create_app

    typer.echo(json.dumps(create_app(settings.load()).openapi(), indent=2))
