from ppo_repro.commands.cli import main

main()
