from widen_cli.cli import main

main()
