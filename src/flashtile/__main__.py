from flashtile.cli.main import app

app()
