from trtopt.cli import main

main()
