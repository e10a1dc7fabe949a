cwlVersion: v1.2
class: CommandLineTool
doc: Write the model of the cell with the most rounds as safetensors, and end the lighthouse.
baseCommand: bash
arguments: [{position: 2, valueFrom: consolidate}, {position: 4, valueFrom: "--"}]
inputs:
  steps: {type: File, inputBinding: {position: 1}, default: {class: File, location: steps.sh}}
  site: {type: File, inputBinding: {position: 3, prefix: --site}}
  home: {type: string, inputBinding: {position: 3, prefix: --home}}
  runs: {type: "Directory[]", inputBinding: {position: 5}}
outputs:
  model: {type: Directory, outputBinding: {glob: model}}
