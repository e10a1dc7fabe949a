cwlVersion: v1.2
class: CommandLineTool
doc: Train one cell for a round, and export what the round would average.
baseCommand: bash
arguments: [{position: 2, valueFrom: train}, {position: 4, valueFrom: "--"}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  home: {type: string, inputBinding: {position: 3, prefix: --home}}
  cell: {type: string, inputBinding: {position: 3, prefix: --cell}}
  project: {type: Directory, inputBinding: {position: 3, prefix: --project}}
  configuration: {type: string, inputBinding: {position: 3, prefix: --configuration}}
  round: {type: int, inputBinding: {position: 3, prefix: --round}}
  start: {type: Directory?, inputBinding: {position: 3, prefix: --start}}
  words: {type: "string[]", inputBinding: {position: 5}}
outputs:
  export: {type: Directory, outputBinding: {glob: export}}
