# One elastic job for each facility, which meet at one lighthouse; then the model of the cell with the most rounds.
# A third facility is a third step like cell_a, with 0/3, 1/3 and 2/3.
cwlVersion: v1.2
class: Workflow
requirements:
  MultipleInputFeatureRequirement: {}
inputs: {project: Directory, configuration: string, address: string, site: File, home: string, site_a: File,
  home_a: string, words_a: 'string[]', site_b: File, home_b: string, words_b: 'string[]'}
steps:
  lighthouse:
    run: lighthouse.cwl
    in: {site: site, home: home, address: address}
    out: [url]
  cell_a:
    run: cell.cwl
    in:
      site: site_a
      home: home_a
      words: words_a
      project: project
      configuration: configuration
      lighthouse: lighthouse/url
      cell: {default: 0/2}
    out: [run]
  cell_b:
    run: cell.cwl
    in:
      site: site_b
      home: home_b
      words: words_b
      project: project
      configuration: configuration
      lighthouse: lighthouse/url
      cell: {default: 1/2}
    out: [run]
  consolidate:
    run: consolidate.cwl
    in:
      site: site
      home: home
      runs:
        source: [cell_a/run, cell_b/run]
        linkMerge: merge_flattened
    out: [model]
outputs:
  model: {type: Directory, outputSource: consolidate/model}
  runs:
    type: 'Directory[]'
    outputSource: [cell_a/run, cell_b/run]
    linkMerge: merge_flattened
